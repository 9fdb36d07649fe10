//! The calls of HIP that an engine of streams is made of, and what is best there.
//!
//! No figure here is measured on AMD's devices yet.

mod copies;
mod graphs;
mod queue;
mod words;

use peerlane_toolkit::device::DeviceContext as _;
use peerlane_toolkit::streams::{ProbeCache, StreamDevice, StreamLimits};

use crate::device::{Context, attribute};
use crate::error::Error;
use crate::sys::hip::hipDeviceAttribute_t;

/// Every peer of a node of eight has a link of its own, and a copy takes one; where there are fewer
/// engines, the copy inside the device keeps one.
const PEER_STREAMS_MAX: usize = 7;
/// One SDMA copy of 256 MiB stalled the engine, pieces of 128 MiB took no longer
/// (ROCm/rocm-systems#9927).
const PIECE_BYTES_MAX: u64 = 128 << 20;

impl StreamDevice for Context {
    fn stream_limits(&self) -> Result<StreamLimits, Error> {
        let engines = hipDeviceAttribute_t::hipDeviceAttributeAsyncEngineCount;
        let copy_engines = attribute(self.hip, self.device(), engines)?;
        let copy_engines = u32::try_from(copy_engines).unwrap_or(0);
        let peer_streams = PEER_STREAMS_MAX.min(copy_engines.saturating_sub(1).max(1) as usize);
        Ok(StreamLimits {
            copy_engines,
            peer_streams_max: peer_streams,
            // Copies do not go in one call.
            one_stream_bytes_max: 0,
            // In a graph the copy inside the device shares a branch.
            captured_sides_max: peer_streams.saturating_sub(1).max(1),
            piece_bytes_max: PIECE_BYTES_MAX,
            // A copy inside the device takes an SDMA engine too, and no compute units.
            own_link_bytes_max: None,
            own_link_captured_bytes_max: None,
        })
    }

    fn probe_cache() -> &'static ProbeCache<Error> {
        static CACHE: ProbeCache<Error> = ProbeCache::new();
        &CACHE
    }
}
