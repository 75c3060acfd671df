"""One suite for all pools: what holds wherever the streams of a loader run.

A module of tests makes a class of each suite for each pool, whose fixture ``pool`` returns a `PoolKind`.
"""

from tests.kits.pool_suite.ends import EndSuite, SkipSuite
from tests.kits.pool_suite.epochs import EpochSuite
from tests.kits.pool_suite.failures import FailureSuite, SendingSuite
from tests.kits.pool_suite.items import AheadSuite, ItemSuite
from tests.kits.pool_suite.kind import FORKED, PoolKind
from tests.kits.pool_suite.loader import LoaderSuite
from tests.kits.pool_suite.orders import BorderSuite, OrderSuite
from tests.kits.pool_suite.service import FunctionSuite, SeedSuite
from tests.kits.pool_suite.states import StateSuite

__all__ = ["FORKED", "EndSuite", "LoaderSuite", "PoolKind", "PoolSuite", "ServiceSuite", "WorkerSuite"]


class PoolSuite(OrderSuite, BorderSuite, EpochSuite, StateSuite, ItemSuite, FailureSuite, EndSuite, SkipSuite):
    """Holds for every pool and both fronts."""


class WorkerSuite(PoolSuite, AheadSuite, SendingSuite):
    """Holds for every pool whose streams run outside of the main process."""


class ServiceSuite(FunctionSuite, SeedSuite):
    """Holds for every pool under its reading service for DataLoader2."""
