//! The engine on the simulated driver: what a start costs, streams of the caller, captures, release.

#[path = "engine/calls.rs"]
mod calls;
#[path = "engine/capture.rs"]
mod capture;
#[path = "engine/gets.rs"]
mod gets;
#[path = "engine/order.rs"]
mod order;
#[path = "engine/release.rs"]
mod release;
#[path = "engine/streams.rs"]
mod streams;
mod support;
#[path = "engine/world.rs"]
mod world;
