//! Defines the numbers and call arguments of HIP that depend on the release.

use crate::header::hipMemoryType;

/// The values of `hipMemoryType` that a release of HIP uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryTypes {
    /// The `hipMemoryType` value for page-locked host memory.
    pub host: hipMemoryType,
    /// The `hipMemoryType` value for device memory.
    pub device: hipMemoryType,
    /// The `hipMemoryType` value for managed memory, which migrates on access.
    pub managed: hipMemoryType,
}

/// Returns the values of `hipMemoryType` for a version number of `hipRuntimeGetVersion`.
///
/// Release 6.0 changed them to those of CUDA.
pub fn memory_types(runtime_version: i32) -> MemoryTypes {
    let (host, device, managed) = if runtime_version < 60_000_000 { (0, 1, 4) } else { (1, 2, 3) };
    MemoryTypes {
        host: hipMemoryType(host),
        device: hipMemoryType(device),
        managed: hipMemoryType(managed),
    }
}

/// Returns whether `hipMemImportFromShareableHandle` takes a pointer to the file descriptor.
///
/// Before 7.1 it does. Since then it takes the descriptor itself, cast to a pointer, as CUDA does. AMD's
/// headers do not document it; PyTorch uses the same rule.
pub fn imports_by_pointer(runtime_version: i32) -> bool {
    runtime_version < 70_100_000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_are_imported_by_number_since_7_1() {
        assert!(imports_by_pointer(60_443_484) && imports_by_pointer(70_051_831));
        assert!(!imports_by_pointer(70_100_000) && !imports_by_pointer(70_253_211));
    }

    #[test]
    fn memory_types_changed_in_6_0() {
        let (before, after) = (memory_types(50_731_921), memory_types(60_443_484));
        assert_eq!([before.host.0, before.device.0, before.managed.0], [0, 1, 4]);
        assert_eq!(after.host, hipMemoryType::hipMemoryTypeHost);
        assert_eq!(after.device, hipMemoryType::hipMemoryTypeDevice);
        assert_eq!(after.managed, hipMemoryType::hipMemoryTypeManaged);
    }
}
