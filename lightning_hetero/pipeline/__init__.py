"""The pipeline engine: unequal stages inside a group, unequal data across groups (after Joint Dynamic DP+MP).

    strategy            HeteroPipelineStrategy, what users name
    fit/                one fit inside Lightning: plan, take this rank's place, train, log, save
    runtime/step/       the user's step, suspended at its backbone; where the autograd graph is cut
    runtime/execute/    one rank's stage at work: schedule, messages, failures, emulated devices
    runtime/ownership/        who holds which layer: gradients summed, states collected, memory given free
    runtime/measure/    what each layer costs, and the step around them
    decide/             plans from costs, pure; decide/schedule/: the order of operations
"""
