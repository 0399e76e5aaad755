"""Trials of Harbor in namespaces, from a plan to what they leave, and a scripted chat endpoint."""

from __future__ import annotations

import json
import threading
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
import trio

from rollout import ExecutionRequest, GraderConfig, RolloutContext
from rollout.backend.harbor.grading.verifier import (
    check_gradable,
    verifier_fields,
    with_placeholder_tests,
)
from rollout.backend.harbor.handover import Handover
from rollout.backend.harbor.limits import EnvironmentWatch
from rollout.backend.harbor.plan import ResolvedTask, TrialPlan, trial_name
from rollout.backend.harbor.result.facts import TrialFacts, facts_of
from rollout.backend.harbor.result.outcomes import outcome_of
from rollout.backend.harbor.trial.run import TrialRun
from rollout.backend.harbor.workspaces import make_workspace
from rollout.errors import InvalidFieldError
from rollout.integrations.asyncio_bridge import open_asyncio_bridge
from rollout.types import RolloutSample

KEY = "sk-hunter2/with+marks-4711"

TESTS = """\
#!/bin/bash
mkdir -p /logs/verifier
[ "$(cat /app/answer.txt 2>/dev/null)" = 42 ] && reward=1 || reward=0
echo "$reward" > /logs/verifier/reward.txt
echo "label=$ROLLOUT_LABEL"
echo "metadata=$ROLLOUT_METADATA"
"""


@pytest.fixture
def make_task(tmp_path):
    """Makes a Harbor task: `make_task(tests=False)` for one that a grader grades."""

    def make(*, tests=True, solution="echo 42 > /app/answer.txt", agent="", extra=""):
        folder = tmp_path / "tasks" / "answer"
        for name in ("environment", "solution", *(["tests"] if tests else [])):
            (folder / name).mkdir(parents=True)
        (folder / "task.toml").write_text(
            'version = "1.0"\n[metadata]\n'
            f"[verifier]\ntimeout_sec = 120.0\n[agent]\ntimeout_sec = 120.0\n"
            f"{agent}[environment]\n{extra}"
        )
        (folder / "instruction.md").write_text("Write 42 to /app/answer.txt.\n")
        (folder / "solution" / "solve.sh").write_text(f"#!/bin/bash\n{solution}\n")
        if tests:
            (folder / "tests" / "test.sh").write_text(TESTS)
        return ResolvedTask(
            name="answer",
            source={"path": str(folder)},
            folder=folder,
            own_tests=tests,
            instruction="Write 42 to /app/answer.txt.",
        )

    return make


class Ran(SimpleNamespace):
    """A trial that has run: `plan`, `facts`, `progress`, `handover`, `outcome`, `error`."""

    @property
    def folder(self):
        return self.plan.trial_dir

    def files_with(self, text):
        """Which files of the workspace hold *text*."""
        data = text.encode()
        return [
            str(path.relative_to(self.plan.workspace))
            for path in self.plan.workspace.rglob("*")
            if path.is_file() and not path.is_symlink() and data in path.read_bytes()
        ]

    def log(self, name):
        return (self.folder / name).read_text()


class Progress:
    """Calls back when the agent starts."""

    def __init__(self, on_agent_start):
        self.report_agent_started = lambda at: on_agent_start()

    def report_status(self, status):
        pass

    async def wait_start_kept(self):
        pass


@pytest.fixture
def run_trial(tmp_path):
    """Runs one trial through a bridge, as `HarborBackend` does."""

    async def run(
        spec, task, *, url="http://127.0.0.1:9/v1", key=KEY, model="policy", grader=None,
        environment=None, agent_sec=None, grader_sec=None, bridge=None, rollout_id="r",
        on_agent_start=None, **request,
    ):  # fmt: skip
        request.setdefault("prompt", [{"role": "user", "content": "What is 6 * 7?"}])
        context = RolloutContext(chat_completions_url=url, api_key=key, rollout_id=rollout_id)
        name = trial_name(rollout_id)
        workspace = make_workspace(tmp_path / "trials", name)
        if grader is not None:
            task = with_placeholder_tests(task, workspace)
        plan = TrialPlan(
            request=ExecutionRequest(id=rollout_id, **request),
            context=context,
            workspace=workspace,
            name=name,
            task=task,
            model=model,
            agent_timeout_sec=agent_sec,
            grader_timeout_sec=grader_sec,
        )
        ran = Ran(plan=plan, error=None)
        watch = EnvironmentWatch(name, 60.0)
        trial = TrialRun(context, lambda status: None, watch)
        if on_agent_start is not None:
            context.progress = Progress(on_agent_start)
        with ExitStack() as stack:
            stack.enter_context(context)
            ran.handover = stack.enter_context(
                Handover(
                    plan=plan,
                    read_sample=lambda _: spec.sample(plan),
                    grader_cls=grader,
                    grader_config=GraderConfig(name="g"),
                    raised=watch.raised,
                )
            )
            try:
                check_gradable(plan.request, task, grader)
                config = await trio.to_thread.run_sync(_config, spec, plan, environment or {})
                if bridge is not None:
                    await bridge.run(trial.run, config, bridge.call_trio_soon)
                else:
                    async with open_asyncio_bridge(grace_sec=5) as own:
                        await own.run(trial.run, config, own.call_trio_soon)
            except InvalidFieldError as error:
                ran.error = error
        ran.events = trial.events
        ran.facts = TrialFacts() if trial.result is None else facts_of(trial.result, watch.raised)
        sample = spec.sample(plan) or RolloutSample()
        ran.outcome = outcome_of(
            ran.facts,
            sample,
            grade=plan.request.grade,
            secrets=plan.secrets,
            graded=ran.handover.graded,
        )
        return ran

    return run


def _config(spec, plan, environment):
    from harbor.models.trial.config import TrialConfig

    return TrialConfig.model_validate(
        {
            "task": plan.task.source,
            "trial_name": plan.name,
            "trials_dir": plan.trials_dir,
            "agent": spec.fields(plan),
            "environment": {
                "import_path": "rollout.backend.harbor.namespace:NamespaceEnvironment",
                **environment,
            },
            "verifier": verifier_fields(plan),
        }
    )


class Chat:
    """A chat endpoint that answers in order, and keeps what it was asked.

    Attributes:
        url: Its base URL.
        asked: The requests: `authorization` and `body`.
    """

    def __init__(self, url, asked):
        self.url = url
        self.asked = asked

    @property
    def keys(self):
        return [each["authorization"] for each in self.asked]


@pytest.fixture
def chat():
    """Opens endpoints: `chat(*contents)`; the last answer is repeated."""
    with ExitStack() as stack:

        def opened(*contents):
            asked = []

            class Handler(BaseHTTPRequestHandler):
                def do_POST(self):
                    body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                    asked.append(
                        {"path": self.path, "authorization": self.headers["authorization"],
                         "body": body}
                    )  # fmt: skip
                    content = contents[min(len(asked), len(contents)) - 1]
                    answer = json.dumps(completion(body["model"], content)).encode()
                    self.send_response(200)
                    self.send_header("content-type", "application/json")
                    self.send_header("content-length", str(len(answer)))
                    self.end_headers()
                    self.wfile.write(answer)

                def log_message(self, *args):
                    pass

            server = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
            thread = threading.Thread(target=server.serve_forever, args=(0.05,))
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            return Chat(f"http://127.0.0.1:{server.server_address[1]}/v1", asked)

        yield opened


def completion(model, content):
    return {
        "id": "c",
        "object": "chat.completion",
        "created": 0,
        "model": model,
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": content},
            }
        ],
        "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10},
    }
