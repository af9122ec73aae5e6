// Looks at pages of the docs site, in light and dark, in a desktop's and in a
// phone's browser, without any other host, and prints what it found.
//
//	node site.mjs <chromium> <url> <folder for screenshots> <path>...
import {launch, patience} from './browser.mjs';

const [executablePath, url, folder, ...paths] = process.argv.slice(2);
const browser = await launch(executablePath);
const sizes = {desktop: {width: 1440, height: 900}, phone: {width: 390, height: 844}};

async function look(path, size, colorScheme) {
	const context = await browser.newContext({viewport: sizes[size], colorScheme});
	const page = await context.newPage();
	const name = `${path.replaceAll('/', '-') || 'home-'}${size}-${colorScheme}`;
	const report = {name, errors: [], elsewhere: []};
	page.on('pageerror', (e) => report.errors.push(e.message));
	await context.route((to) => !to.href.startsWith(url) && to.protocol !== 'data:', (route) => {
		report.elsewhere.push(route.request().url());
		return route.abort();
	});
	await page.goto(url + path, {waitUntil: 'load'});
	const found = await page.evaluate(() => ({
		// by how much the page is too wide: tables and code scroll by themselves
		sideways: document.documentElement.scrollWidth - window.innerWidth,
		broken: [...document.images].filter((i) => i.complete && !i.naturalWidth).map((i) => i.src),
		// Caddyfiles, and those of them that are colored
		caddyfiles: document.querySelectorAll('.language-caddyfile').length,
		colored: [...document.querySelectorAll('.language-caddyfile')].filter((block) => block.querySelector('.k')).length,
	}));
	await page.screenshot({path: `${folder}/${name}.png`});
	await context.close();
	return {...report, ...found};
}

// search types words into the search of the home page, as a reader does.
async function search(words) {
	const context = await browser.newContext({viewport: sizes.desktop});
	const page = await context.newPage();
	await context.route((to) => !to.href.startsWith(url) && to.protocol !== 'data:', (route) => route.abort());
	await page.goto(url);
	await page.locator('[data-md-component=search-query]').click();
	await page.keyboard.type(words);
	const results = page.locator('.md-search-result__link');
	await results.first().waitFor({timeout: patience});
	const links = await results.evaluateAll((all) => all.map((a) => new URL(a.href).pathname));
	await context.close();
	return links;
}

const looked = [];
for (const path of paths)
	for (const size of Object.keys(sizes))
		for (const scheme of ['light', 'dark']) looked.push(await look(path, size, scheme));
console.log(JSON.stringify({looked, found: await search('ready_path')}));
await browser.close();
