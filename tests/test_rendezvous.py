"""The module at torch's path `torch.distributed.rendezvous`."""

import importlib
import pickle


def test_the_module_that_is_called_as_the_function_is_pickled():
    module = importlib.import_module("dure.rendezvous")
    assert pickle.loads(pickle.dumps(module)) is module
