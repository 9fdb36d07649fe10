//! Ranks that gather by SDMA engines of the simulated driver, whose own log tells which
//! engine copied what and when.

#[path = "sdma/engines.rs"]
mod engines;
#[path = "sdma/faults.rs"]
mod faults;
#[path = "sdma/gather.rs"]
mod gather;
#[path = "sdma/processes.rs"]
mod processes;
#[path = "sdma/world.rs"]
mod world;
