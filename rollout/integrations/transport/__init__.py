"""HTTP transports to a rollout's model endpoint, which record what is sent and answered."""

__all__: list[str] = []
