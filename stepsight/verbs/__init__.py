"""What the command line can do: ``measuring`` (collect, train, import, show, demo, experiment), ``asking`` (predict,
explain, search) and ``judging`` (evaluate, calibrate), with options that verbs share in ``options``."""
