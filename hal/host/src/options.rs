//! Defines the options of a host fabric.

use std::time::Duration;

use super::error::Error;
use peerlane_hal::Caps;

/// The options of a host fabric, such as the capabilities of its engines and the time to spin. The
/// defaults are what the backend does best.
///
/// Every capability can be reduced, to test an algorithm without it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// The capabilities and limits that the engines of the fabric report.
    pub caps: Caps,
    /// The number of ops that the queue of an engine holds, at least `caps.slice_ops_max`.
    pub queue_ops: usize,
    /// The longest time that [`park`](peerlane_hal::CopyEngine::park) polls before it sleeps. While
    /// another rank is awake on its core, it yields the core between two polls, or sleeps at once
    /// if a yield took long. By default twice the time that the last wake-ups took, 50 µs to 10 ms.
    pub spin: Option<Duration>,
    /// How the threads that drive engines are distributed over the cores.
    pub bind: Bind,
    /// The smallest copy in bytes that bypasses the processor cache. By default, half of the cache
    /// that a rank can use: its share of the last level on AMD's processors, and the second level
    /// on others.
    pub streaming_bytes_min: Option<u64>,
}

/// The ways in which the threads that drive the engines of ranks are distributed over cores.
///
/// Every way respects the affinity mask of a thread, so a thread that is bound to one core stays
/// there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Bind {
    /// A thread that begins to wait on the core of other ranks moves to a core with fewer ranks. Its
    /// affinity mask is unchanged afterwards.
    #[default]
    Auto,
    /// The thread that creates the engines of a rank is bound to one core for good, each rank to
    /// another core in turn, physical cores first. Threads that it spawns later inherit this.
    Core,
    /// The scheduler alone chooses.
    None,
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
            bind: Bind::Auto,
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
