"""What ``hva doctor`` looks at (:mod:`~hvd_adaptive.commands.diagnosis.facts`), measures
(:mod:`~hvd_adaptive.commands.diagnosis.probe`), judges (:mod:`~hvd_adaptive.commands.diagnosis.checks`)
and prints (:mod:`~hvd_adaptive.commands.diagnosis.text`)."""
