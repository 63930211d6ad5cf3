"""Studies over width, learning rate, damping and seed: what is best at each width, and does it transfer?"""

from mukron.study.certificate import Certificate, certify
from mukron.study.design import Search, usual_schemes
from mukron.study.errors import StudyError
from mukron.study.points import Point, Result
from mukron.study.record import StudyRecord
from mukron.study.transfer import TransferStudy
from mukron.study.work import StudyProgress

__all__ = [
    "Certificate",
    "Point",
    "Result",
    "Search",
    "StudyError",
    "StudyProgress",
    "StudyRecord",
    "TransferStudy",
    "certify",
    "usual_schemes",
]
