"""What check_command_line makes of the arguments of train.py."""

from __future__ import annotations

import pytest

from hetero_fw.app import check_command_line, worst_status


@pytest.mark.parametrize(
    ("given", "rewritten"),
    [
        ([], []),
        (["seed=1", "-m"], ["-m", "seed=1"]),
        (["seed=1", "--multirun", "ckpt=fixed"], ["--multirun", "seed=1", "ckpt=fixed"]),
        (["seed=1", "--help"], ["--help", "seed=1"]),
        (["no=thing", "--hydra-help"], ["--hydra-help", "no=thing"]),
        (["--cfg", "job", "seed=x"], ["--cfg", "job", "seed=x"]),
        # Known to the schema or to the target, but in no file.
        (["data=digits", "model=digits_mlp", "data.paths=x"], None),
        (["optim.optimizer.eps=1e-8"], ["++optim.optimizer.eps=1e-8"]),
        (["ckpt.prior_mtbf_s={local: 3600}"], ["++ckpt.prior_mtbf_s={local: 3600}"]),
        (["+callbacks.t._target_=lightning.pytorch.callbacks.Timer"], None),
        (
            ["-m", "run_name=x", "seed=1,2"],
            ["-m", "run_name=x", "seed=1,2", "hydra.sweep.dir=${paths.root}/${run_name}"],
        ),
        (
            ["-m", "run_name=x,y"],
            [
                "-m",
                "run_name=x,y",
                "hydra.sweep.dir=${paths.root}",
                "hydra.sweep.subdir=${run_name}",
            ],
        ),
        (
            ["-m", "run_name=x", "hydra.sweep.dir=/tmp/s"],
            ["-m", "run_name=x", "hydra.sweep.dir=/tmp/s"],
        ),
        (["-m", "trainer.max_steps=range(1,4)", "ckpt=glob(*)"], None),
        (["hydra.mode=MULTIRUN", "seed=1,2"], None),
    ],
)
def test_rewriting(given: list[str], rewritten: list[str] | None) -> None:
    if given[:1] == ["data=digits"]:
        rewritten = ["data=digits", "model=digits_mlp", "++data.paths=x"]
    assert check_command_line(given) == (given if rewritten is None else rewritten)


def test_flags_that_do_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        check_command_line(["--hardware", "local"])
    assert caught.value.code == 2
    assert "--hardware" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("statuses", "worst"),
    [([], 0), ([0, 0], 0), ([0, 75], 75), ([75, 2, 0], 2), ([2, 1, 75], 1)],
)
def test_the_status_of_a_sweep(statuses: list[int], worst: int) -> None:
    assert worst_status(statuses) == worst
