"""SGLang plugin: the attention backend named ``inkling``.

plugin.py registers everything, flags.py owns the options, requirements.py says what is refused,
backend.py and pool.py run, patches.py is the ledger of every change to the engine, versions.py
holds what differs between engine versions, measure.py times a started engine for the benchmark.
Importing this package does not import the engine.
"""
