//! Selects the devices that a process sees, by variables such as `CUDA_VISIBLE_DEVICES`.

/// Returns the selected ones of `devices`, up to the first entry that names none of them.
///
/// An entry is an index in `devices`, or the beginning of a device's name.
pub(crate) fn parse(
    selection: Option<&str>,
    devices: &[u32],
    name: impl Fn(u32) -> String,
) -> Vec<u32> {
    let Some(selection) = selection else { return devices.to_vec() };
    let mut visible = Vec::new();
    for entry in selection.split(',').map(str::trim) {
        let found = match entry.parse::<usize>() {
            Ok(place) => devices.get(place).copied(),
            Err(_) if entry.len() > "GPU-".len() => {
                devices.iter().copied().find(|device| name(*device).starts_with(entry))
            }
            Err(_) => None,
        };
        let Some(device) = found else { break };
        // A device that is named twice makes the whole list void.
        if visible.contains(&device) {
            return Vec::new();
        }
        visible.push(device);
    }
    visible
}
