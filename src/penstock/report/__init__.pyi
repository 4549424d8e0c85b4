from penstock.report.build import write_report as write_report
