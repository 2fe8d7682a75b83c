"""Studies of a tiny model."""

from covey.observability.record_files import FOLDER, files, read_rows
from covey_tools.study.study import Study
from tests.support import runs, tiny

ADAPTER = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
COMMON = {name: value for name, value in runs.DEFAULTS.items() if name not in ("save_strategy", "disable_tqdm")}


def study(folder, variants, **changes):
    settings = {name: changes.pop(name) for name in list(changes) if name in COMMON} | changes.pop("settings", {})
    arguments = {"reward_funcs": runs.longer, "train_dataset": tiny.rows(), **changes}
    args = {**COMMON, **settings, "peft": ADAPTER, "output_dir": str(folder)}
    made = Study(tiny.model(), variants, args, processing_class=tiny.tokenizer(), **arguments)
    return made


def adapters(folder):
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


def completions(folder):
    recorded = files(folder / FOLDER)
    assert recorded
    return [row["completion"] for path in recorded for row in read_rows(path)]
