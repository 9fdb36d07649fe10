//! What a number means depends on the release.

use crate::header::hipMemoryType;

/// The numbers of `hipMemoryType` that this crate's users tell apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryTypes {
    /// Page-locked memory of the host.
    pub host: hipMemoryType,
    /// Memory of a device.
    pub device: hipMemoryType,
    /// Memory that moves by itself.
    pub managed: hipMemoryType,
}

/// The numbers of a release, as `hipRuntimeGetVersion` gives it: they were changed in 6.0 to those of
/// other vendors.
pub fn memory_types(runtime_version: i32) -> MemoryTypes {
    let (host, device, managed) = if runtime_version < 60_000_000 { (0, 1, 4) } else { (1, 2, 3) };
    MemoryTypes {
        host: hipMemoryType(host),
        device: hipMemoryType(device),
        managed: hipMemoryType(managed),
    }
}

/// Whether `hipMemImportFromShareableHandle` takes a pointer to a file descriptor: before 7.1 it did,
/// since then it takes the number in the place of the pointer, as other vendors' do. PyTorch tells the
/// two apart in the same way; AMD's headers do not say.
pub fn imports_by_pointer(runtime_version: i32) -> bool {
    runtime_version < 70_100_000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_are_imported_by_number_from_7_1_on() {
        assert!(imports_by_pointer(60_443_484) && imports_by_pointer(70_051_831));
        assert!(!imports_by_pointer(70_100_000) && !imports_by_pointer(70_253_211));
    }

    #[test]
    fn numbers_of_memory_changed_in_6_0() {
        let (before, after) = (memory_types(50_731_921), memory_types(60_443_484));
        assert_eq!([before.host.0, before.device.0, before.managed.0], [0, 1, 4]);
        assert_eq!(after.host, hipMemoryType::hipMemoryTypeHost);
        assert_eq!(after.device, hipMemoryType::hipMemoryTypeDevice);
        assert_eq!(after.managed, hipMemoryType::hipMemoryTypeManaged);
    }
}
