//! Whole gathers of every shape over the host backend: uneven and empty shards, lists, tensors,
//! windows; in place and not, in one chunk and in several.

#[path = "support/ranks.rs"]
mod ranks;

#[path = "shapes/list.rs"]
mod list;
#[path = "shapes/tensors.rs"]
mod tensors;
#[path = "shapes/uneven.rs"]
mod uneven;
#[path = "shapes/window.rs"]
mod window;
