//! Tests all-gathers by SDMA engines of the simulated driver, which logs the copies of each engine.

#[path = "sdma/engines.rs"]
mod engines;
#[path = "sdma/faults.rs"]
mod faults;
#[path = "sdma/gather.rs"]
mod gather;
#[path = "sdma/processes.rs"]
mod processes;
#[path = "sdma/ranks.rs"]
mod ranks;
