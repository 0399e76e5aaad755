"""The graders that come with the package, fuzzed."""

from __future__ import annotations

import json

from evaluation.fuzzing.test_fuzzing import row
from integrations.scripted import say, scripted_endpoint
from support import Script

from rollout import LocalBackend
from rollout.evaluation.fuzzing import FuzzSettings, fuzz_grader
from rollout.graders.rubric import Criterion, Judge, Rubric, RubricGrader, RubricGraderConfig


async def test_a_judge_gets_any_answer_as_data_between_its_markers():
    def careful(request):
        """Score 1 for the reference alone, and for whatever is said outside of the markers."""
        _, said = (message["content"] for message in request.body["messages"])
        marker, text, end = said.split("\n")
        data = json.loads(text)
        answer = data["conversation"][-1]["content"]
        obeys = marker != end or said.count(marker) != 2
        score = 1 if obeys or answer.strip() == data["reference"] else 0
        return say(json.dumps({"right": {"reason": answer[:200], "score": score}}))

    async with scripted_endpoint(careful) as endpoint:
        rubric = Rubric(
            criteria=[Criterion(name="right", description="The answer is right.")],
            judges=[Judge(model="m", url=endpoint.url)],
        )
        config = RubricGraderConfig(name="rubric", rubric=rubric)
        backend = LocalBackend(workflow=Script, grader=RubricGrader, grader_config=config)
        skip = ("case", "full-stop", "punctuation", "separators", "number", "latex")
        settings = FuzzSettings(examples=12, skip=skip, grader_timeout_sec=None)
        assert await fuzz_grader(backend, [row()], settings) == []
