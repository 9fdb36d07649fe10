//! Reads and writes what a group gathers, in any kind of memory.

use peerlane_collectives::group::MemoryRange;
use peerlane_tests::Outcome;

use crate::blocking;
use crate::vendor::gpu::Gpu;
use crate::vendor::stream::CallerStream;

/// The owner of memory.
pub(crate) enum Access {
    Host,
    Cuda {
        gpu: Gpu,
        stream: CallerStream,
    },
    /// The device that is current.
    Rocm,
}

impl Access {
    /// Whether it is memory of a device.
    pub(crate) fn is_device(&self) -> bool {
        !matches!(self, Self::Host)
    }

    /// A device and a stream of the caller.
    pub(crate) fn of_gpu(gpu: Gpu) -> Outcome<Self> {
        let stream = gpu.stream()?;
        Ok(Self::Cuda { gpu, stream })
    }

    /// Before a start, or after it.
    pub(crate) fn write(&self, place: MemoryRange, bytes: &[u8]) -> Outcome {
        assert_eq!(place.bytes, bytes.len() as u64);
        match self {
            Self::Host => {
                let to = place.base.as_ptr();
                // SAFETY: the place has so many bytes of the host, which no engine uses now.
                unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
                Ok(())
            }
            Self::Cuda { gpu, stream } => {
                let pinned = gpu.pinned(bytes.len())?;
                pinned.write(0, bytes);
                stream.copy_in(place.base.as_ptr() as u64, &pinned, 0, bytes.len())?;
                stream.finish()
            }
            Self::Rocm => {
                blocking::write(place, bytes);
                Ok(())
            }
        }
    }

    /// After a start.
    pub(crate) fn read(&self, place: MemoryRange) -> Outcome<Vec<u8>> {
        let bytes = place.bytes as usize;
        match self {
            Self::Host => {
                // SAFETY: as for `write`.
                let seen = unsafe { std::slice::from_raw_parts(place.base.as_ptr(), bytes) };
                Ok(seen.to_vec())
            }
            Self::Cuda { gpu, stream } => {
                let pinned = gpu.pinned(bytes)?;
                stream.copy_out(&pinned, 0, place.base.as_ptr() as u64, bytes)?;
                stream.finish()?;
                Ok(pinned.read(0, bytes))
            }
            Self::Rocm => Ok(blocking::read(place)),
        }
    }
}
