//! Runs all-gathers of every shape over the host backend: uneven and empty blocks, lists, tensors and windows.
//!
//! Each runs in place and out of place, and in one or several chunks.

mod list;
mod tensors;
mod uneven;
mod window;
