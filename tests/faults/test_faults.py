"""The short form of the campaign of faults; `pytest -m slow -s -n 0 tests/faults` prints the counts."""

import campaign
import pytest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "count", "first"), [("kills", 10, 0), ("files", 40, 0), ("kills", 10, 3), ("disks", 3, 0)]
)
def test_no_fault_changes_a_result_silently(tmp_path, command, count, first):
    assert campaign.main([command, f"--count={count}", f"--first={first}", f"--out={tmp_path / 'faults.jsonl'}"]) == 0
