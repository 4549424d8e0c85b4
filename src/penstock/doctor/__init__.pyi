from penstock.doctor.examination import examine as examine
from penstock.doctor.finding import Examination as Examination
from penstock.doctor.finding import Finding as Finding
