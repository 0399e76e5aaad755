"""Names of spans, attributes and events.

Those that begin with ``gen_ai`` are of OpenTelemetry's semantic conventions for generative AI, as
version 1.41 of the conventions has them; their status there is "development". The others are ours.
"""

from __future__ import annotations

__all__ = [
    "AGENT_NAME",
    "CONVERSATION_ID",
    "ERROR_TYPE",
    "EVALUATION_EVENT",
    "EVALUATION_NAME",
    "EVALUATION_SCORE",
    "FINISH_REASONS",
    "INPUT_TOKENS",
    "OPERATION",
    "OUTPUT_TOKENS",
    "PROVIDER",
    "REQUEST_MODEL",
    "RESPONSE_ID",
    "RESPONSE_MODEL",
    "RUN",
    "SERVER_ADDRESS",
    "SERVER_PORT",
    "STATUS",
    "TOOL_NAME",
]

OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
AGENT_NAME = "gen_ai.agent.name"
CONVERSATION_ID = "gen_ai.conversation.id"
REQUEST_MODEL = "gen_ai.request.model"
RESPONSE_MODEL = "gen_ai.response.model"
RESPONSE_ID = "gen_ai.response.id"
FINISH_REASONS = "gen_ai.response.finish_reasons"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
TOOL_NAME = "gen_ai.tool.name"
EVALUATION_EVENT = "gen_ai.evaluation.result"
EVALUATION_NAME = "gen_ai.evaluation.name"
EVALUATION_SCORE = "gen_ai.evaluation.score.value"

ERROR_TYPE = "error.type"
SERVER_ADDRESS = "server.address"
SERVER_PORT = "server.port"

STATUS = "rollout.status"
RUN = "rollout.run"
