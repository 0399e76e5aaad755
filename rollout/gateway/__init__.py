"""The model gateway: the model endpoint that a server offers to the agents of its rollouts.

With `ModelGateway` an agent is given an address of its server and a token that counts for its
rollout alone, while it runs. The endpoint's own URL and key stay in the server, and each call is
recorded where it passes, whatever program made it.
"""

from rollout.gateway.gateway import ModelGateway, Upstream
from rollout.gateway.limits import Price
from rollout.gateway.litellm import LiteLLMUpstream
from rollout.types.limits import Limits

__all__ = ["Limits", "LiteLLMUpstream", "ModelGateway", "Price", "Upstream"]
