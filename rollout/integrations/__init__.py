"""What joins rollouts to other people's frameworks; each module stands for itself.

Nothing is imported here, so that an integration costs nothing until it is used.
"""

__all__: list[str] = []
