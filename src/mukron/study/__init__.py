"""Studies over width, learning rate, damping and seed: which settings are best at each width, and do they transfer?"""

from mukron.study.certificate import Certificate, certify
from mukron.study.design import Design, Search, usual_schemes
from mukron.study.errors import StudyError
from mukron.study.points import Point, Result
from mukron.study.progress import StudyProgress
from mukron.study.record import StudyRecord
from mukron.study.transfer import TransferStudy

__all__ = [
    "Certificate",
    "Design",
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
