"""Bad input: one message that names the key, the rule and what was meant; all problems at once."""

from __future__ import annotations

import pytest

from hetero_fw.app import ConfigSource, compose_checked
from hetero_fw.errors import ConfigError

BAD_INPUTS = [
    # Names that do not exist.
    (
        ["hardware=a100_v100_mx"],
        "hardware=a100_v100_mx: unknown option",
        "Did you mean 'a100_v100_mix'",
    ),
    (["ckpt=adaptiv"], "ckpt=adaptiv: unknown option", "Options of ckpt: adaptive, fixed, none"),
    (["experiment=digts"], "experiment=digts", "Did you mean 'digits'"),
    (["hardwar=local"], "hardwar: unknown key", "Did you mean 'hardware'"),
    (["experimnt=digits"], "experimnt: unknown key", "Did you mean 'experiment'"),
    (["hardware/gpu=x"], "hardware/gpu: unknown config group", "Groups: "),
    (["+ckpt=fixed"], "+ckpt=fixed", "Drop the +"),
    (["trainer.max_step=3"], "trainer.max_step: unknown key", "Did you mean 'trainer.max_steps'"),
    (["+typo=1"], "typo: unknown key", "Keys at the top: run_name"),
    (["++trainer.max_stps=1"], "trainer.max_stps: unknown key", "'trainer.max_steps'"),
    (["+max_restarts=1"], "max_restarts: unknown key", "Did you mean 'recovery.max_restarts'"),
    (["+ckpt.max_restarts=1"], "ckpt.max_restarts", "Did you mean 'recovery.max_restarts'"),
    (["hardware.emulation.dilatation=2"], "hardware.emulation.dilatation", "emulation.dilation"),
    (["hardware.groups.a100.num_nodes=4"], "hardware.groups.a100: unknown key", "hardware=OPTION"),
    (
        ["hardware=a100_v100_mix", "hardware.groups.a10.num_nodes=4"],
        "hardware.groups.a10: unknown key",
        "Did you mean 'hardware.groups.a100'",
    ),
    (["model.module.num_layer=3"], "model.module.num_layer: recipes.gpt", "'num_layers'"),
    (
        ["logger=wandb", "logger.wandb.foo=1"],
        "logger.wandb.foo: unknown key",
        "add it with +logger.wandb.foo=VALUE",
    ),
    (["+model.module.num_layer=3"], "model.module.num_layer: recipes.gpt", "'num_layers'"),
    (["+optim.optimizer.wd=0"], "optim.optimizer.wd", "torch.optim.AdamW takes no such argument"),
    (["~nothing"], "nothing: unknown key", "Keys at the top"),
    # Values of the wrong kind.
    (["trainer.max_steps=abc"], "trainer.max_steps=abc", "a whole number >= 1"),
    (["trainer.max_steps=2.5"], "trainer.max_steps=2.5", "a whole number >= 1"),
    (["trainer.max_steps=true"], "trainer.max_steps=true", "a whole number"),
    (["trainer.max_steps=0"], "trainer.max_steps=0", ">= 1"),
    (["seed=-1"], "seed=-1", "a whole number >= 0"),
    (["monitor.report=maybe"], "monitor.report=maybe", "true or false"),
    (["data.global_batch_size=null"], "data.global_batch_size=null", "a whole number"),
    (["parallel.memory_margin=1.5"], "parallel.memory_margin=1.5", ">= 0 and <= 0.9"),
    (
        ["hardware.emulation.dilation=fast"],
        "hardware.emulation.dilation=fast",
        "auto or a number > 0",
    ),
    (["parallel.batch_split=[a,b]"], "parallel.batch_split=[a,b]", "auto, uniform or a list"),
    (["parallel.zero_stage=1"], "parallel.zero_stage=1", "one of auto, 2, 3"),
    (["ckpt.keep_latest_k=1"], "ckpt.keep_latest_k=1", ">= 2"),
    (["ckpt.keep_best=-1"], "ckpt.keep_best=-1", ">= 0"),
    (["ckpt.keep_every_n_steps=0"], "ckpt.keep_every_n_steps=0", ">= 1"),
    (["ckpt.monitor_mode=best"], "ckpt.monitor_mode=best", "max"),
    (["model.init_from=nowhere.safetensors"], "model.init_from=nowhere", "no such file"),
    (["paths.root=null"], "paths.root=null", "text"),
    (["trainer={max_steps:3,oops:1}"], "trainer.oops: unknown key", "Keys in trainer"),
    (["ckpt.policy={a:1}"], "ckpt.policy: is a section", "adaptive, fixed, none"),
    (["logger.x=3"], "logger.x: unknown key", "Keys in logger: none"),
    (["+logger.x=3"], "logger.x=3", "a section with a _target_"),
    (["seed=???"], "seed: missing", "seed=VALUE"),
    (["seed=${sed}"], "seed=${sed}: cannot be resolved", "sed"),
    # Choices.
    (["resume=yes"], "resume=yes", "one of auto, must, never"),
    (["resume=mus"], "resume=mus", "Did you mean 'must'"),
    (["mode=training"], "mode=training", "one of train, plan"),
    (["parallel.precision=bf16"], "parallel.precision=bf16", "Did you mean 'bf16-mixed'"),
    (["parallel.precision=16"], "parallel.precision=16", "16-mixed"),
    (["hardware.intra_link=nvlnk3"], "hardware.intra_link=nvlnk3", "Did you mean 'nvlink3'"),
    (
        ["hardware=a100_v100_mix", "hardware.groups.a100.device=a100"],
        "hardware.groups.a100.device=a100",
        "Did you mean 'a100-",
    ),
    # Targets.
    (["model.module._target_=recipes.gpt.GPTModul"], "model.module._target_", "'GPTModule'"),
    (["model.module._target_=nowhere.Net"], "nowhere.Net", "no package 'nowhere' is installed"),
    (["~data.train._target_"], "data.train: needs a _target_", "dotted path"),
    (["+callbacks.t._target_=lightning.pytorch.callbacks.Timr"], "callbacks.t._target_", "'Timer'"),
    # Keys that are right one by one.
    (["resume=must"], "resume=must", "run_name=NAME"),
    (["run_name=a/b"], "run_name=a/b", "one directory"),
    (["run_name=.."], "run_name=..", "one directory"),
    (["parallel.batch_split=[12,4]"], "parallel.batch_split=[12,4]: adds up to 16", "global_batch"),
    (
        ["parallel=single", "parallel.batch_split=[12,4]", "data.global_batch_size=16"],
        "divides the batch among 2 ranks",
        "parallel.kind=single",
    ),
    (["hardware=gpu_tpu_mix"], "hardware.planning_only=true", "mode=plan"),
    (["hardware.probe=false"], "hardware.groups: is empty", "hardware.probe=true"),
    (["hardware=single_gpu", "hardware.probe=true"], "hardware.probe=true", "declares gpu"),
    (["recovery.process_group_timeout_s=20"], "process_group_timeout_s=20", "30 s"),
    (["data.val=null", "trainer.val_interval_steps=5"], "trainer.val_interval_steps=5", "data.val"),
    (["optim=module", "optim.base_batch_size=32"], "optim.base_batch_size", "optim=adamw"),
    (["optim.optimizer._partial_=false"], "optim.optimizer", "_partial_: true"),
    (["data=digits"], "model.module.sequence_length=${data.sequence_length}", "fit together"),
    (["paths.run_dir=/tmp/x"], "paths.run_dir=/tmp/x", "paths.root"),
    (["ckpt.prefix=a/b"], "ckpt.prefix=a/b", "letters"),
    (["ckpt.storage=s33://bucket/x"], "ckpt.storage=s33://bucket/x", "Did you mean 's3'"),
    (["ckpt.storage=s3://"], "ckpt.storage=s3://: names no place", "s3://bucket/folder"),
    (["ckpt.storage=s3:/b/x"], "ckpt.storage=s3:/b/x: is a URL with one slash", "s3://b/x"),
    (["ckpt.storage=file:/x"], "ckpt.storage=file:/x", "file:///x"),
    (["ckpt.storage=''"], "ckpt.storage='': names no place", "null"),
    (["ckpt.storage='simplecache::s3://b/x'"], "ckpt.storage=simplecache", "chain"),
    (["ckpt.storage=s3://me:pw@bucket/x"], "ckpt.storage: holds a password", "oc.env"),
    (["ckpt.storage=[a]"], "ckpt.storage=[a]", "text or null"),
    (["ckpt.storage_options={key:a}"], "ckpt.storage_options: have no effect", "ckpt.storage"),
    (["ckpt.storage_options=abc"], "ckpt.storage_options=***", "a section"),
    (["ckpt.tiers.local=cache"], "ckpt.tiers.local=cache", "an absolute path"),
    (["ckpt.tiers.local=''"], "ckpt.tiers.local=''", "an absolute path"),
    (["ckpt.tiers.local=s3://b/x"], "ckpt.tiers.local=s3://b/x: is a URL", "ckpt.storage"),
    (["ckpt.tiers.locl=/x"], "ckpt.tiers.locl: unknown key", "'ckpt.tiers.local'"),
    (["ckpt.tiers=/x"], "ckpt.tiers=/x", "local, storage_interval_steps"),
    (["ckpt.tiers.storage_interval_steps=9"], "ckpt.tiers.storage_interval_steps=9", "tiers.local"),
    (
        ["ckpt.tiers.local=/x", "ckpt.tiers.storage_interval_steps=0"],
        "ckpt.tiers.storage_interval_steps=0",
        ">= 1",
    ),
    (["ckpt.min_replica_size=0"], "ckpt.min_replica_size=0", ">= 1"),
    (["ckpt.min_replica_size=two"], "ckpt.min_replica_size=two", "a whole number"),
    (["ckpt.async_mode=thread"], "ckpt.async_mode=thread", "a thread (async)"),
    (["ckpt.async_mode=asynch"], "ckpt.async_mode=asynch", "Did you mean 'async'"),
    (["ckpt.async_mode=false"], "ckpt.async_mode=false", "disabled"),
    (["ckpt.hash=sha265"], "ckpt.hash=sha265", "Did you mean 'sha256'"),
    (["ckpt.hash=md5"], "ckpt.hash=md5", "hold against forgery"),
    (["ckpt.timeout_s=0"], "ckpt.timeout_s=0", ">= 1"),
    (["ckpt.timeout_s=inf"], "ckpt.timeout_s=inf", "<= 86400"),
    (["ckpt.storage=http://host/x"], "ckpt.storage=http://host/x", "not written to"),
    (["ckpt.timeout_s=null"], "ckpt.timeout_s=null", "a number >= 1"),
    # The command line itself.
    (["trainer"], "trainer: is not of the form key=value", "key=value"),
    (["run_name='a"], "run_name='a: cannot be read", "quotes"),
    (["seed=1,2"], "seed=1,2: several values need -m", "seed=[1,2]"),
    (["hydra.run.dirr=x"], "hydra.run.dirr", "configuration"),
]


# Inputs that break several rules.
SEVERAL = (
    "data=digits",
    "parallel.batch_split=[12,4]",
    "~data.train._target_",
)


def problems_of(overrides: list[str], source: ConfigSource | None = None) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        compose_checked(overrides, source)
    return caught.value.problems


@pytest.mark.parametrize(
    ("overrides", "start", "part"), BAD_INPUTS, ids=[" ".join(row[0]) for row in BAD_INPUTS]
)
def test_message(overrides: list[str], start: str, part: str) -> None:
    problems = problems_of(overrides)
    told = [problem for problem in problems if start in problem]
    assert len(told) == 1, problems
    assert len(problems) == 1 or " ".join(overrides) in SEVERAL, problems
    assert part in told[0]
    assert "\n" not in told[0]


def test_all_problems_at_once() -> None:
    problems = problems_of(
        [
            "hardware=a100_v100_mx",
            "hardware.groups.a100.num_nodes=4",
            "ckpt=adaptiv",
            "trainer.max_step=3",
            "seed=-1",
            "+typo=1",
            "resume=must",
            "model.module._target_=nowhere.Net",
        ]
    )
    words = ["hardware=a100_v100_mx", "ckpt=adaptiv", "trainer.max_step:", "seed=-1", "typo:"]
    words += ["resume=must", "nowhere"]
    assert len(problems) == len(words)
    for word in words:
        assert any(word in problem for problem in problems)


def test_an_unknown_option_hides_only_what_depends_on_it() -> None:
    assert len(problems_of(["experiment=xyz", "data.train.foo=1", "trainer.foo=1"])) == 1
    problems = problems_of(["model=xyz", "model.module.foo=1", "trainer.foo=1"])
    assert [problem.split(":")[0] for problem in problems] == ["model=xyz", "trainer.foo"]


def test_missing_folders_and_files() -> None:
    assert "--config-dir=nowhere" in problems_of([], ConfigSource(config_dir="nowhere"))[0]
    assert "--config-path=nowhere" in problems_of([], ConfigSource(config_path="nowhere"))[0]
    assert "nothing" in problems_of([], ConfigSource(config_name="nothing"))[0]


GOOD_INPUTS = [
    ["run_name=7"],
    ["run_name='my run'"],
    ["+callbacks.t._target_=lightning.pytorch.callbacks.Timer", "callbacks.t.interval=step"],
    ["hardware=a100_v100_mix", "~hardware.groups.v100"],
    ["hardware.probe=false", "+hardware.groups.x.device=l4", "hardware.groups.x.num_nodes=2"],
    ["parallel.batch_split=[16,16]", "data.global_batch_size=32"],
    ["parallel.num_microbatches=4", "parallel.zero_stage=3", "trainer.gradient_clip_val=1"],
    ["hardware.emulation.dilation=3", "hardware.emulation.headroom=2"],
    ["data.paths=[a.txt,b.txt]"],
    ["data.paths='corpus/*.txt'"],
    ["++trainer.max_steps=5"],
    ["~logger", "~monitor.line_interval_steps"],
    ["optim=module", "model.workload=null", "data.val=null"],
    ["optim.scheduler={_target_:torch.optim.lr_scheduler.LinearLR,_partial_:true}"],
    ["trainer={max_steps:3}"],
    ["debug=fast", "experiment=digits"],
    ["ckpt.tiers.local=/dev/shm/x", "ckpt.tiers.storage_interval_steps=9"],
    ["ckpt.tiers.local='~/x'", "ckpt.min_replica_size=1", "ckpt.async_mode=disabled"],
    ["debug=one_device", "hardware=a100_v100_mix"],
]


@pytest.mark.parametrize("overrides", GOOD_INPUTS, ids=" ".join)
def test_good_input_is_complete(overrides: list[str]) -> None:
    config = compose_checked(overrides)
    assert config.trainer.limit_val_batches is None
    assert config.monitor.line_interval_steps >= 1
    assert set(config.logger) <= {"wandb"}


def test_a_name_that_looks_like_a_number_becomes_text() -> None:
    assert compose_checked(["run_name=7"]).run_name == "7"


def test_groups_of_the_user_are_completed() -> None:
    config = compose_checked(["hardware.probe=false", "+hardware.groups.x.device=l4"])
    assert config.hardware.groups.x == {
        "device": "l4",
        "num_nodes": 1,
        "devices_per_node": 1,
        "memory_gib": None,
        "mfu": None,
    }
