//! Serves the C library and the Python package: operations that are kept between calls, immediate
//! calls, streams by their pointers, reports as JSON, and the detection of forks.

mod all_to_all_v;
mod fork;
mod immediate;
mod operation;
mod report;
mod stream;

pub use all_to_all_v::AnyAllToAllV;
pub use fork::check_process;
pub use immediate::{Array, Call, Location};
pub use operation::{AnyOperation, Request, block_part};
pub use report::stats_json;
pub use stream::Stream;
