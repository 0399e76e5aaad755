#!/bin/bash
# What SANDBOX_AGENT=oracle runs. It knows the answer to one question.
echo 42 > /app/answer.txt
