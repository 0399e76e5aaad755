"""Integrations with model SDKs, agent frameworks and asyncio; each module stands for itself.

Nothing is imported here, so that an integration costs nothing until it is used.
"""

__all__: list[str] = []
