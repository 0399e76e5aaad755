#!/bin/bash
# Run after the agent has ended. ROLLOUT_LABEL is the label of the rollout.
mkdir -p /logs/verifier
answer=$(tr -d '[:space:]' < /app/answer.txt)
if [ -n "$answer" ] && [ "$answer" = "$ROLLOUT_LABEL" ]; then
    echo 1 > /logs/verifier/reward.txt
else
    echo 0 > /logs/verifier/reward.txt
fi
