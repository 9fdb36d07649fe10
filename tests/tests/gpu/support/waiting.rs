//! Waits for streams.

use std::time::{Duration, Instant};

use peerlane_tests::{Failure, GpuDriver, Outcome};

use crate::vendor::memory::DeviceMemory;
use crate::vendor::stream::CallerStream;

/// How long the work of a test may take.
const PATIENCE: Duration = Duration::from_secs(30);
const NAP: Duration = Duration::from_micros(100);

impl CallerStream {
    /// Keeps the stream busy for about a millisecond.
    pub(crate) fn busy(&self, driver: GpuDriver, scratch: &DeviceMemory) -> Outcome {
        let half = scratch.bytes / 2;
        let copies = match driver {
            GpuDriver::Device => 200,
            GpuDriver::Simulated => 4,
        };
        (0..copies)
            .try_for_each(|_| self.copy(scratch.address + half as u64, scratch.address, half))
    }

    /// Waits until everything on it is done.
    pub(crate) fn finish(&self) -> Outcome {
        self.finish_within(PATIENCE).map(drop)
    }

    /// Waits until everything on it is done; how long that took.
    pub(crate) fn finish_within(&self, patience: Duration) -> Outcome<Duration> {
        let begun = Instant::now();
        while !self.is_done()? {
            if begun.elapsed() > patience {
                return Err(Failure::new(format!("a stream is not done within {patience:?}")));
            }
            std::thread::sleep(NAP);
        }
        Ok(begun.elapsed())
    }
}
