"""Values out of a running loop without a stall: the log and its sinks, the progress line, exact means."""

from hotloop.metrics.jsonlines import JsonLines, read_metrics
from hotloop.metrics.log import Log
from hotloop.metrics.means import Means
from hotloop.metrics.progress import Progress
from hotloop.metrics.sinks import Sink
from hotloop.metrics.tensorboard import TensorBoard

__all__ = ["JsonLines", "Log", "Means", "Progress", "Sink", "TensorBoard", "read_metrics"]
