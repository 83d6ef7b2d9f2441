"""Settings of all tests."""

import importlib.util

if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import settings

    # Other work on the machine makes an example slow; that is no failure.
    settings.register_profile("tessera", deadline=None)
    settings.load_profile("tessera")
