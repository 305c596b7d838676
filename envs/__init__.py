"""Environment servers that speak AgentGym's HTTP protocol."""

from envs.interrupts import report_early_interrupts

report_early_interrupts()
