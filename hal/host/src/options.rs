//! Defines the options of a host fabric.

use std::time::Duration;

use super::error::Error;
use peerlane_hal::Caps;

/// The options of a host fabric, such as the capabilities of its engines and the time to spin. The defaults are what
/// the backend does best.
///
/// Every capability can be reduced, to test an algorithm without it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// The capabilities and limits that the engines of the fabric report.
    pub caps: Caps,
    /// The number of ops that the queue of an engine holds, at least `caps.slice_ops_max`.
    pub queue_ops: usize,
    /// The longest time that [`park`](peerlane_hal::CopyEngine::park) spins before it sleeps. It does not spin while
    /// another rank is awake on its core. By default 100 µs, or 20 µs where ranks share the core.
    pub spin: Option<Duration>,
    /// The smallest copy in bytes that bypasses the processor cache. By default, half of the cache that a rank can
    /// use: its share of the last level on AMD's processors, and the second level on others.
    pub streaming_bytes_min: Option<u64>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            caps: Caps {
                queued_wait: true,
                gets: true,
                rows: true,
                polled: true,
                slice_ops_max: 1024,
                ..Caps::new("processor")
            },
            queue_ops: 4096,
            spin: None,
            streaming_bytes_min: None,
        }
    }
}

impl Options {
    pub(crate) fn check(&self) -> Result<(), Error> {
        let refuse = |text: String| Err(Error::Argument(text));
        let Caps { slice_ops_max, piece_bytes_max, put_align_bytes, .. } = self.caps;
        if slice_ops_max == 0 || piece_bytes_max == 0 || put_align_bytes == 0 {
            return refuse(format!(
                "invalid caps: expected slice_ops_max, piece_bytes_max and put_align_bytes of at \
                 least 1, found {:?}",
                self.caps
            ));
        }
        if self.queue_ops < slice_ops_max {
            let queue_ops = self.queue_ops;
            return refuse(format!(
                "queue_ops is {queue_ops}, expected at least {slice_ops_max}, the value of \
                 slice_ops_max"
            ));
        }
        Ok(())
    }
}
