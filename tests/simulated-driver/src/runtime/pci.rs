//! Returns the PCI addresses and names of devices, which all APIs share.

/// The bus of the first device.
const FIRST_BUS: u32 = 0x10;

pub(crate) fn bus(physical: u32) -> u32 {
    FIRST_BUS + physical
}

/// Returns the PCI address in upper case.
pub(crate) fn address(physical: u32) -> String {
    format!("0000:{:02X}:00.0", bus(physical))
}

pub(crate) fn uuid(physical: u32) -> [u8; 16] {
    let mut bytes = *b"simulated gpu 00";
    bytes[14] = b'0' + (physical / 10) as u8;
    bytes[15] = b'0' + (physical % 10) as u8;
    bytes
}

/// As NVIDIA's tools print it.
pub(crate) fn uuid_text(physical: u32) -> String {
    let hex: String = uuid(physical).iter().map(|byte| format!("{byte:02x}")).collect();
    let (a, b, c, d, e) = (&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]);
    format!("GPU-{a}-{b}-{c}-{d}-{e}")
}

/// As AMD's tools print it: the last eight bytes of what HIP answers are these letters.
pub(crate) fn unique_id(physical: u32) -> String {
    format!("{:016x}", 0x5349_4d55_0000_0000 + u64::from(physical))
}
