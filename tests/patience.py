"""Imported, it lets the disk take as long as it may on a busy machine, where a test does not say how long."""

from eventlog import log, process
from eventlog.writer import Writer

SECONDS = 60.0

log.EXPORT_SECONDS = log.COMMIT_SECONDS = SECONDS
process.END_SECONDS = process.CLOSE_SECONDS = SECONDS
for close in (log.Log.close, Writer.close):
    close.__defaults__ = (SECONDS,)
Writer.__init__.__kwdefaults__["block_seconds"] = SECONDS
