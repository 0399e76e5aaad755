"""The parts that the adapters of asyncio agent frameworks share."""

__all__: list[str] = []
