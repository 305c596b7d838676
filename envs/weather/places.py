"""Cities with country, latitude, longitude and elevation in metres.

The geography is real, so a model's knowledge of the world helps; the weather is invented
(`envs.weather.climate`).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """A city that the tools know by name."""

    name: str
    country_code: str
    latitude: float
    longitude: float
    elevation: float


CITIES = (
    Place("Amsterdam", "NL", 52.374, 4.8897, 13.0),
    Place("Athens", "GR", 37.9838, 23.7278, 70.0),
    Place("Auckland", "NZ", -36.8485, 174.7635, 26.0),
    Place("Bangkok", "TH", 13.754, 100.5014, 4.0),
    Place("Beijing", "CN", 39.9075, 116.3972, 49.0),
    Place("Berlin", "DE", 52.5244, 13.4105, 74.0),
    Place("Bogota", "CO", 4.6097, -74.0818, 2582.0),
    Place("Boston", "US", 42.3584, -71.0598, 38.0),
    Place("Buenos Aires", "AR", -34.6132, -58.3772, 31.0),
    Place("Cairo", "EG", 30.0626, 31.2497, 23.0),
    Place("Calgary", "CA", 51.0501, -114.0853, 1042.0),
    Place("Cape Town", "ZA", -33.9258, 18.4232, 25.0),
    Place("Chicago", "US", 41.85, -87.65, 180.0),
    Place("Copenhagen", "DK", 55.6759, 12.5655, 14.0),
    Place("Delhi", "IN", 28.652, 77.2315, 227.0),
    Place("Denver", "US", 39.7392, -104.9847, 1609.0),
    Place("Dubai", "AE", 25.0772, 55.3093, 5.0),
    Place("Dublin", "IE", 53.3331, -6.2489, 17.0),
    Place("Edinburgh", "GB", 55.9521, -3.1965, 76.0),
    Place("Geneva", "CH", 46.2022, 6.1457, 388.0),
    Place("Havana", "CU", 23.133, -82.383, 24.0),
    Place("Helsinki", "FI", 60.1695, 24.9354, 26.0),
    Place("Houston", "US", 29.7633, -95.3633, 30.0),
    Place("Istanbul", "TR", 41.0138, 28.9497, 39.0),
    Place("Jakarta", "ID", -6.2146, 106.8451, 8.0),
    Place("Johannesburg", "ZA", -26.2023, 28.0436, 1767.0),
    Place("Kathmandu", "NP", 27.7017, 85.3206, 1317.0),
    Place("Kyoto", "JP", 35.0211, 135.7538, 50.0),
    Place("Lagos", "NG", 6.4541, 3.3947, 11.0),
    Place("La Paz", "BO", -16.5, -68.15, 3782.0),
    Place("Lima", "PE", -12.0432, -77.0282, 154.0),
    Place("Lisbon", "PT", 38.7167, -9.1333, 45.0),
    Place("London", "GB", 51.5085, -0.1257, 25.0),
    Place("Los Angeles", "US", 34.0522, -118.2437, 89.0),
    Place("Madrid", "ES", 40.4165, -3.7026, 665.0),
    Place("Melbourne", "AU", -37.814, 144.9633, 25.0),
    Place("Mexico City", "MX", 19.4285, -99.1277, 2240.0),
    Place("Miami", "US", 25.7743, -80.1937, 25.0),
    Place("Minneapolis", "US", 44.98, -93.2638, 264.0),
    Place("Montreal", "CA", 45.5088, -73.5878, 216.0),
    Place("Moscow", "RU", 55.7522, 37.6156, 144.0),
    Place("Mumbai", "IN", 19.0728, 72.8826, 14.0),
    Place("Munich", "DE", 48.1374, 11.5755, 524.0),
    Place("Nairobi", "KE", -1.2833, 36.8167, 1684.0),
    Place("New York", "US", 40.7143, -74.006, 10.0),
    Place("Oslo", "NO", 59.9127, 10.7461, 26.0),
    Place("Paris", "FR", 48.8534, 2.3488, 42.0),
    Place("Phoenix", "US", 33.4484, -112.074, 366.0),
    Place("Prague", "CZ", 50.088, 14.4208, 202.0),
    Place("Quito", "EC", -0.2299, -78.525, 2854.0),
    Place("Reykjavik", "IS", 64.1355, -21.8954, 37.0),
    Place("Rome", "IT", 41.8919, 12.5113, 20.0),
    Place("Santiago", "CL", -33.4569, -70.6483, 556.0),
    Place("Sapporo", "JP", 43.0667, 141.35, 26.0),
    Place("Seattle", "US", 47.6062, -122.3321, 56.0),
    Place("Seoul", "KR", 37.566, 126.9784, 38.0),
    Place("Shanghai", "CN", 31.2222, 121.4581, 12.0),
    Place("Singapore", "SG", 1.2897, 103.8501, 23.0),
    Place("Stockholm", "SE", 59.3294, 18.0687, 17.0),
    Place("Sydney", "AU", -33.8679, 151.2073, 58.0),
    Place("Tehran", "IR", 35.6944, 51.4215, 1179.0),
    Place("Tokyo", "JP", 35.6895, 139.6917, 44.0),
    Place("Toronto", "CA", 43.7064, -79.3986, 175.0),
    Place("Ulaanbaatar", "MN", 47.9077, 106.8832, 1285.0),
    Place("Vancouver", "CA", 49.2497, -123.1193, 70.0),
    Place("Vienna", "AT", 48.2085, 16.3721, 171.0),
    Place("Warsaw", "PL", 52.2298, 21.0118, 113.0),
    Place("Wellington", "NZ", -41.2866, 174.7756, 20.0),
    Place("Zurich", "CH", 47.3667, 8.55, 429.0),
)


def find(name: str) -> Place | None:
    """The place with that name, ignoring case."""
    return _BY_NAME.get(" ".join(name.lower().split()))


def nearest(latitude: float, longitude: float) -> Place:
    """The place closest to the coordinates, by difference in degrees."""

    def distance(place: Place) -> float:
        east = abs(place.longitude - longitude)
        return (place.latitude - latitude) ** 2 + min(east, 360 - east) ** 2

    return min(CITIES, key=distance)


_BY_NAME = {place.name.lower(): place for place in CITIES}
