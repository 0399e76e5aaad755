"""Real rollouts on one machine, against a model that is a script.

Theory of operation: three pieces talk HTTP over loopback in one `trio.run`. A chat endpoint
(`rollout.demo.chat`) speaks the OpenAI chat completions protocol; behind it is no language
model but a scripted one (`rollout.demo.arithmetic`) that computes answers and gets some of
them wrong on purpose. A rollout server (`rollout.demo.server`) runs a workflow that asks that
endpoint, and a grader that compares with the label. A client (`rollout.demo.runner`) runs the
rollouts and adds up what came of them.
"""

from rollout.demo.report import DemoReport
from rollout.demo.runner import DemoPlan, run_demo

__all__ = ["DemoPlan", "DemoReport", "run_demo"]
