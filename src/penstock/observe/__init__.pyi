from penstock.observe.check.examine import examine as examine
from penstock.observe.finding import Finding as Finding
from penstock.observe.page import write_report as write_report
from penstock.observe.timing import Timings as Timings
from penstock.observe.watcher import Watch as Watch
from penstock.observe.watcher import watch as watch
