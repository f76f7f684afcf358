"""The short form of the campaign of faults; `pytest -m slow -s tests/faults` prints the counts."""

import campaign
import pytest


@pytest.mark.slow
@pytest.mark.parametrize(("what", "count"), [("kills", 20), ("files", 40), ("disks", 3)])
def test_no_fault_changes_a_result_without_a_word(tmp_path, what, count):
    assert campaign.main([what, f"--count={count}", f"--out={tmp_path / 'faults.jsonl'}"]) == 0
