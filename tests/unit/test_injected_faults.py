"""A run loads `ecrm.testing` only when the run asks for a fault or a double."""

from ecrm.config.faults import Kill
from ecrm.config.schema import TestingConfig
from ecrm.run.inject_faults import injected_faults
from support.commands import forked

LOADED = """
import sys
from ecrm.config.faults import Kill
from ecrm.config.schema import TestingConfig
from ecrm.run.build_rank import injected_faults

kills = [Kill(0, 5)] if sys.argv[1] == "kill" else []
found = injected_faults(kills, TestingConfig(), 0, print, print)
print(found is not None, any(name.startswith("ecrm.testing") for name in sys.modules))
"""


def loaded(word):
    done = forked(["-c", LOADED, word])
    return done.stdout.split() or done.stderr


def test_a_rank_loads_injected_faults_only_when_a_fault_is_asked_for():
    assert loaded("none") == ["False", "False"]
    assert loaded("kill") == ["True", "True"]


def test_every_kind_of_fault_is_injected():
    def asked(*kills, **testing):
        return injected_faults(kills, TestingConfig(**testing), 0, print, print) is not None

    assert not asked()
    assert asked(Kill(0, 5))
    assert asked(flip="0@3:row")
    assert asked(gpu_fault="0@3:update:lost")
    assert asked(skip_undo=True)
