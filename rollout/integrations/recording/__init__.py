"""Recording of model calls: answers read off the wire, conversations, and the sample they make."""

__all__: list[str] = []
