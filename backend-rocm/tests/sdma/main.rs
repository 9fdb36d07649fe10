//! Tests all-gathers by SDMA engines of the simulated driver, which logs the copies of each engine.

mod engines;
mod faults;
mod gather;
mod processes;
mod ranks;
