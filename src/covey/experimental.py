"""Refuses imports that were `trl.experimental...`: what Covey has of it is in `covey` itself."""

raise ImportError(
    "covey has no module experimental. GRPOTrainer, RLOOTrainer and DistillationTrainer are imported from covey itself;"
    " other trainers of trl.experimental are settings of these. The guide 'Coming from TRL' translates them."
)
