"""docs/metrics.md names every key of the JSON documents and of the metrics."""

import dataclasses
from pathlib import Path

from digen.evaluate import EvalReport
from digen.observe.summary import Change, Summary, Worker
from digen.run import RunSummary

PAGE = (Path(__file__).parent.parent / "docs" / "metrics.md").read_text()


def test_every_key_of_a_json_document_is_documented() -> None:
    section = PAGE.split("## JSON documents")[1]
    report = EvalReport(Path(), Path(), 0, 0.0, 0.0, {"x": (0.0, 0.0)}, Path()).as_dict()
    keys = {*report, *report["rewards"]["x"]}
    for kind in (Summary, Worker, Change):
        keys |= {field.name for field in dataclasses.fields(kind)}
    keys |= {field.name for field in dataclasses.fields(RunSummary)} - {"summary"}
    missing = {key for key in keys if f"`{key}`" not in section}
    assert not missing
