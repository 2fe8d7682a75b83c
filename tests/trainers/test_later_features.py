"""What comes with later versions is refused with a word about it, never ignored."""

import pytest
import runs

import tiny


@pytest.mark.parametrize("column", ["image", "images"])
def test_pictures_are_refused(tmp_path, column):
    rows = [{**row, column: ["a picture"]} for row in tiny.rows()]
    with pytest.raises(ValueError, match=f"pictures in column '{column}'.*text alone"):
        runs.trainer(tmp_path, parts={"train_dataset": rows})
