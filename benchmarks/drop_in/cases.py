"""Which of Lightning's tests are run, and which of them cannot say anything about another class."""

from __future__ import annotations

TESTS = (  # below tests/tests_pytorch: loops, optimization, logging, hooks, checkpoints, tuning, launching
    "callbacks/test_early_stopping.py", "callbacks/test_lr_monitor.py", "callbacks/test_stochastic_weight_avg.py",
    "checkpointing/test_model_checkpoint.py", "checkpointing/test_trainer_checkpoint.py", "core", "loops",
    "models/test_hooks.py", "models/test_restore.py", "overrides", "strategies/test_common.py",
    "strategies/test_ddp.py", "strategies/test_ddp_integration.py", "trainer/flags", "trainer/logging_",
    "trainer/optimization", "trainer/test_trainer.py", "tuner",
)  # fmt: skip
TWO_RANKS = (  # of these, on two ranks, where each test takes seconds: what looks closest at a training
    "models/test_hooks.py", "trainer/optimization/test_manual_optimization.py",
    "trainer/optimization/test_optimizers.py", "loops/test_training_loop.py",
    "callbacks/test_stochastic_weight_avg.py", "trainer/logging_/test_train_loop_logging.py",
)  # fmt: skip
QUICK = ("loops/test_evaluation_loop.py",)

CLASSES = {
    "stock": "lightning.pytorch.strategies.DDPStrategy",
    "balanced": "lightning_hetero.LoadBalancedStrategy",
    "stale": "lightning_hetero.BoundedStalenessStrategy",
    "stale-bsp": "benchmarks.drop_in.barrier.StaleWithBarrier",
    "pipeline": "lightning_hetero.HeteroPipelineStrategy",
}

EXCLUDED = {  # engine -> tests that say nothing about its class; why
    engine: (
        r"manual_(call_counts|log\b)|optimizer_closure(_2)?$|test_swa_(callback\[False|callback_sch|resume)",
        "a mock in the place of `Strategy.backward` calls the strategy's own, which calls the mock again",
    )
    for engine in ("stale", "stale-bsp")
}
