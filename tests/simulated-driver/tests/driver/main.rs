//! Tests the simulated driver by the symbols that its users call.
//!
//! A process has one driver, and its devices keep what a test did to them. A test that breaks a device, counts what
//! exists, or needs another machine runs in a process of its own.

mod api;
mod captures;
mod copies;
mod faults;
mod hip;
mod hsa;
mod kernels;
mod machines;
mod releases;
mod sharing;
mod symbols;
mod virtual_memory;
mod words;
