"""Parts of the asyncio bridge: calls between trio and asyncio, and the thread of the loop."""

__all__: list[str] = []
